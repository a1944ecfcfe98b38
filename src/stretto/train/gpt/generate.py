"""Generates text with a trained GPT, token by token."""

from collections.abc import Sequence

import torch

from stretto.models import GPT


@torch.no_grad()
def generate(
    model: GPT, prompt_tokens: Sequence[int], steps: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    """Generate `steps` tokens after the prompt, with a model in one process. Returns the prompt and the new tokens.

    A token is sampled with probability softmax(logits / temperature); temperature 0 takes the most probable one. The
    model sees the last `max_seq_len` tokens. Raises ValueError for an empty prompt or a negative temperature.
    """
    if not prompt_tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if temperature < 0:
        raise ValueError(f"the temperature is {temperature}, but must be at least 0")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    tokens = torch.tensor([list(prompt_tokens)], dtype=torch.int64, device=device)
    for _ in range(steps):
        logits = model(tokens[:, -model.config.max_seq_len :])[0, -1].float()
        if temperature == 0:
            drawn = logits.argmax().view(1, 1)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).view(1, 1)
        tokens = torch.cat((tokens, drawn), dim=1)
    model.train(was_training)
    return tokens[0].tolist()
