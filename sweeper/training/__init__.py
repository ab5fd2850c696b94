"""The training loop and its parts. `loop.train` is the story; each part holds one idea."""
