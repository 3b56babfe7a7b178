"""Class-activation maps: the methods, each with its paper and equation, and the targets they explain."""
