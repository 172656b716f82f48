"""What MTP heads compute, in NumPy float64, written from the published descriptions."""
