"""What values tensors take over calibration data, and the ranges that follow."""
