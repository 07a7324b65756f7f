"""Tables kept elsewhere or otherwise than as a parameter, and the files that hold tables."""
