"""The nn.Modules of embeddings: a file for each family."""
