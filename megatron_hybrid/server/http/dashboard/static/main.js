// The page: a chat on one side, the cache on the other.

import { installChat } from "./chat.js";
import { installFigures } from "./figures.js";
import { installKeyDialog } from "./key.js";

const figures = installFigures();
installChat();
installKeyDialog(() => figures.poll());
