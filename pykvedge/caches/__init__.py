"""What was computed once and may be needed again: in memory, in a folder, embeddings of images."""
