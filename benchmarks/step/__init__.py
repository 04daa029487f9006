"""What a decode step costs on this machine, whatever the weights say."""
