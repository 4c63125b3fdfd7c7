"""What was tried beyond the paper: dense, simple and exact, to be measured and not to be served."""
