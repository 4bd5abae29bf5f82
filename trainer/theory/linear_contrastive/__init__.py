"""Linear encoders that are trained on pictures with two features, in closed form and by gradient descent."""
