"""A trained model taken elsewhere: merged, converted, and proved equal to what was trained."""
