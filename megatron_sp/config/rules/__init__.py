"""What a valid configuration is: one function for each topic, returning sentences about what is wrong."""
