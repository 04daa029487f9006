"""``rejection_chances`` with planted mistakes, which tests of the law must see."""

from medusa.acceptance.rejection import rejection_chances


def generous(draft, draft_probs, target_probs):
    """Accepts a little too often."""
    chances, left = rejection_chances(draft, draft_probs, target_probs)
    return chances**0.8, left


def forgetful(draft, draft_probs, target_probs):
    """Forgets, when it draws the bonus token, what was refused."""
    return rejection_chances(draft, draft_probs, target_probs)[0], target_probs
