"""What the command lines share: parsing and errors, and the oldest versions that run."""
