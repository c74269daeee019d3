"""What several commands share: finding a session, exit messages, errors, text for terminals."""
