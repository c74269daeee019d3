"""The Textual apps: the timer that reads and draws, navigation, settings. Screens have folders of their own."""
