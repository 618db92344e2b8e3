"""What a training run saves, when, and how it continues from it."""
