"""Training many parameter vectors at once: objectives, steps and the loop around them."""
