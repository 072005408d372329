"""Small networks on a processor in compiled C++ of our own: trajectories and predictions that never leave the fast memory."""
