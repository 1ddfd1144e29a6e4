"""What a GPU of a cluster holds, sends and receives when a model is trained, from shapes alone."""
