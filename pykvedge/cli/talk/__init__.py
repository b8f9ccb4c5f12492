"""A conversation at a terminal has lines, commands that begin with a slash, and answers as they come."""
