"""Draft heads: small models that guess a target model's next tokens from its hidden states."""
