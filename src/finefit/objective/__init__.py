"""What is minimised: a batch in, a loss sum and a count out."""
