// The page: the chats that are kept, the one that goes on, and the cache.

import { Chats } from "./chats.js";
import { installCurl } from "./curl.js";
import { installExplanations } from "./explain.js";
import { installFigures } from "./figures.js";
import { installKeyDialog } from "./key.js";

installExplanations();
const figures = installFigures();
const showCurl = installCurl();
new Chats(showCurl);
installKeyDialog(() => figures.poll());
