"""Training: data, recipes, loops and the state that resumes them."""
