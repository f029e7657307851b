"""Client-side training: models, losses, learning rates and local SGD."""
