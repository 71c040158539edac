"""Actor and critic, an optimizer each, on a small corridor; the target network follows slowly."""

import copy
import logging
import os
import sys

import torch
from torch import nn
from torch.distributions import Categorical

logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(message)s")
log = logging.getLogger(__name__)

torch.manual_seed(39)
torch.set_num_threads(1)
actor = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
target = copy.deepcopy(critic).requires_grad_(False)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-2)

for episode in range(20):
    place, score = 2, 0.0
    for _ in range(15):
        state = nn.functional.one_hot(torch.tensor(place), 5).float()
        choice = Categorical(logits=actor(state))
        action = choice.sample()
        place = max(0, min(4, place + 2 * action.item() - 1))
        reward = float(place == 4)
        score += reward
        following = nn.functional.one_hot(torch.tensor(place), 5).float()
        advantage = reward + 0.9 * target(following) - critic(state)
        critic_optimizer.zero_grad()
        advantage.pow(2).sum().backward()
        critic_optimizer.step()
        actor_optimizer.zero_grad()
        (-choice.log_prob(action) * advantage.detach()).sum().backward()
        actor_optimizer.step()
        for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
    if episode % 5 == 4:
        log.info("episode %d", episode)
        print(f"episode {episode}: score {score}")
print("warning: not converged", file=sys.stderr)
torch.save({"actor": actor.state_dict(), "critic": critic.state_dict()}, os.environ["OUT"])
sys.exit(3)
