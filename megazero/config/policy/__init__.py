"""policy: settings of policy gradients, and the rules on them."""
