"""RMS norms, alone and fused with what comes before them in the model."""
