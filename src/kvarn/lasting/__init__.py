"""What outlasts a process: which cells are the same bits, and files that hold cells."""
