"""Every figure that the README claims: one command each, with its peers in the same run, and its results on disk."""
