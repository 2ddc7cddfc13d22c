"""What training minimises: a batch goes in, a loss sum and a count come out."""
