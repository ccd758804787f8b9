"""The head, from the arguments of a call to losses and gradients; :mod:`.head.loop` is the page to read."""
