"""How much of a drafter's guesses a base accepts, from texts of that base that are written once."""
