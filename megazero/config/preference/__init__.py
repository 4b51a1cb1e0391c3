"""preference: settings of losses over pairs of answers, and the rules on them."""
