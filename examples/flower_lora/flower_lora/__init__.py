"""A Flower app that fine-tunes a frozen transformer with LoRA adapters."""
