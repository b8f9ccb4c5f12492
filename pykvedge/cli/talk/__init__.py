"""The conversation at a terminal: lines, commands that begin with a slash, answers as they come."""
