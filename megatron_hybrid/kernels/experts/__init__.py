"""The experts of a mixture: every token through those that its router chose."""
