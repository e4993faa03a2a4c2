"""What the GPT examples share: the text, the settings, the model, and one training step."""
