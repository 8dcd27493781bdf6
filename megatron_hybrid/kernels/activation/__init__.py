"""Activations of MLPs, with the gate where there is one."""
