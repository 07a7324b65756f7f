"""One file for each family: the calls that a user would choose between."""
