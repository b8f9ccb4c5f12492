"""`kvedge serve`: one model answers many conversations over HTTP, in bounded memory."""
