"""The mLSTM of xLSTM."""
