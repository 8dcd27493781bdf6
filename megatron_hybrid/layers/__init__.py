"""The layers that models are made of; `inputs` is what a step hands to them."""
