# SPDX-License-Identifier: Apache-2.0
"""Lengths of packed documents: those of The Pile, by its components."""

from random import Random

# Size in GiB and mean document in KiB, of the table in the README of github.com/EleutherAI/the-pile (commit 0373f19).
PILE = (
    (90.27, 30.55),  # PubMed Central
    (100.96, 538.36),  # Bibliotik
    (56.21, 46.61),  # ArXiv
    (62.77, 3.85),  # OpenWebText2
    (630.64, 11.68),  # Github
    (51.15, 15.06),  # FreeLaw
    (32.20, 2.16),  # StackExchange
    (22.90, 4.08),  # USPTO
    (17.27, 3.00),  # Wikipedia (en)
    (19.26, 1.30),  # PubMed Abstracts
    (10.88, 398.73),  # Gutenberg (PG-19)
    (12.98, 30.48),  # OpenSubtitles
    (7.75, 48343.04),  # DM Mathematics
    (11.60, 25.69),  # Literotica
    (6.30, 369.87),  # BookCorpus
    (5.52, 2058.24),  # Ubuntu IRC
    (4.59, 68.87),  # EuroParl
    (3.73, 22.55),  # YoutubeSubtitles
    (2.38, 73.37),  # PhilPapers
    (1.89, 2.11),  # NIH ExPorter
    (1.59, 4.46),  # HackerNews
    (0.88, 1.78),  # Enron Emails
)


def draw_documents(total: int, seed: int) -> tuple[int, ...]:
    """Where packed documents begin in a sequence of tokens of 4 bytes, then its length, where the last one is cut."""
    random, starts = Random(seed), [0]
    while starts[-1] < total:
        _, size = random.choices(PILE, [whole / size for whole, size in PILE])[0]
        starts.append(min(total, starts[-1] + round(size * 1024 / 4)))
    return tuple(starts)
