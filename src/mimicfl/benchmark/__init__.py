"""The reference evaluation: algorithms tuned with equal budgets, compared over paired seeds under many availability patterns."""
