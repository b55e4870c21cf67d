"""What the data mover costs, measured: not part of the product, and not of its tests."""
