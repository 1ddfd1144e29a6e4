"""Memory and traffic of each GPU of a cluster that trains a model, from shapes alone."""
