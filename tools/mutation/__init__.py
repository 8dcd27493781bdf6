"""Which test cases notice that a line is wrong: for tools/mutation_matrix.py."""
