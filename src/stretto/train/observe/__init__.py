"""What a run shows and records of itself: progress, metrics, summaries, traces and timelines."""
