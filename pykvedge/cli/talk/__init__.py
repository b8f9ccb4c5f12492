"""A conversation at a terminal: input lines, commands with a slash, and streamed answers."""
