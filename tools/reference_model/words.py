"""Word lists from which `chats.py` builds its chats. Plain data, written by hand."""

ADJECTIVES = """
old new small large big little tall short long narrow wide round square heavy light bright dark
quiet loud clean dusty broken wooden golden silver plastic paper metal stone iron copper leather
northern southern eastern western north south east west upper lower inner outer front back left
right main second third first last spare hidden secret public private royal local central modern
ancient famous empty full open closed locked sealed painted striped spotted rusty shiny polished
folded frozen warm cold hot cool wet dry soft hard smooth rough thick thin deep steep flat curved
green red blue yellow white black brown grey orange purple pink crimson friendly gentle clever
lucky sleepy hungry brave proud curious patient lonely happy sad young busy lazy tiny giant huge
""".split()

THINGS = """
gate door window key lock safe box chest drawer cabinet locker cupboard shelf table desk chair
sofa lamp mirror clock watch phone radio camera printer scanner computer laptop server screen
keyboard bicycle car truck van bus train boat ship ferry plane engine wheel bridge tower tunnel
fence wall roof ladder bucket hammer saw drill wrench rope chain basket bag suitcase backpack
wallet umbrella coat jacket scarf hat glove boot shoe ring necklace crown vase bottle cup bowl
plate kettle oven stove fridge freezer toaster blanket pillow carpet curtain painting statue
piano violin guitar drum flute trumpet book letter map atlas notebook folder file report ticket
passport contract invoice parcel package envelope stamp coin flag tent lantern candle torch
telescope microscope compass robot drone rocket satellite generator pump valve sensor switch
battery cable antenna machine tractor wagon sled kite puppet doll puzzle medal trophy badge
elevator alarm vault archive account channel router beacon buoy anchor barrel crate pallet tank
""".split()

ROOMS = """
kitchen cellar attic garage garden library office hall bathroom bedroom pantry workshop shed
basement studio laboratory classroom canteen lobby corridor balcony terrace courtyard greenhouse
barn stable warehouse storeroom laundry nursery chapel gallery theatre museum market bakery
pharmacy hospital school station harbour airport hotel restaurant castle tower lighthouse mill
factory farm orchard vineyard meadow forest park playground stadium gym pool cafe shop bank
""".split()

CONTAINERS = """
box drawer basket bag bucket jar crate chest cupboard suitcase backpack cabinet locker envelope
tin bowl barrel trunk case folder pocket purse sack bin tray
""".split()

NAMES = """
Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Nora Oscar Paula Quentin
Rosa Simon Tara Ulrich Vera Walter Xenia Yusuf Zoe Alice Boris Carla Dennis Elena Frank Greta
Hugo Ingrid James Kate Liam Martha Nina Oliver Peter Rachel Sam Theresa Victor Wendy Adam Bella
Carlos Diana Erik Fiona George Hannah Ivan Julia Kevin Laura Martin Naomi Otto Priya Robert Sara
Tom Una Vincent Willa Amir Beatrice Chen Daria Edgar Farah Gustav Helen Ian Jasmine Kofi Lucy
Mateo Nadia Omar Petra Ravi Sofia Tariq Ursula Viktor Yara Zachary Aisha Bruno Cecilia Dmitri
Esther Fatima Gregor Hana Igor Joan Kenji Lena Miguel Noah Olga Pablo Rita Stefan Tina Umar
Wanda Yuki Zelda Arthur Brigid Colin Dora Ethan Flora Gavin Heidi Isaac Judith Kurt Lydia Milo
""".split()

SURNAMES = """
Miller Baker Carter Fisher Mason Potter Taylor Walker Weber Schmidt Rossi Moreau Novak Silva
Tanaka Kim Singh Okafor Haddad Jensen Larsen Murphy Kelly Brown Green White Clarke Evans Foster
Garcia Hughes Ivanov Jackson Keller Lopez Meyer Nielsen Olsen Parker Quinn Reed Stone Turner
Vogel Wood Young Zimmer Adler Bishop Chapman Dixon Ellis Frost Grant Harper Irving Knight
""".split()

CITIES = """
Lisbon Madrid Paris London Berlin Vienna Rome Milan Naples Athens Prague Warsaw Budapest Zurich
Geneva Brussels Amsterdam Hamburg Munich Oslo Stockholm Copenhagen Helsinki Dublin Edinburgh
Glasgow Cardiff York Oxford Bristol Leeds Tokyo Kyoto Osaka Seoul Beijing Shanghai Mumbai Delhi
Cairo Nairobi Lagos Accra Tunis Boston Chicago Denver Dallas Seattle Portland Austin Houston
Toronto Montreal Vancouver Havana Lima Quito Bogota Santiago Sydney Perth Auckland Wellington
Porto Seville Valencia Bergen Riga Tallinn Vilnius Krakow Zagreb Sofia Malta Reykjavik
""".split()

COLOURS = """
red blue green yellow orange purple pink brown black white grey silver gold turquoise violet
crimson beige teal navy maroon olive lilac amber ivory scarlet indigo magenta cyan bronze
""".split()

FOODS = """
apples pears plums cherries grapes lemons oranges bananas carrots potatoes onions tomatoes peas
beans mushrooms noodles rice bread cheese butter honey jam soup stew pizza pasta pancakes
dumplings sandwiches salad chocolate biscuits cake pie pudding yoghurt olives almonds walnuts
""".split()

COUNTABLES = """
apples pears lemons oranges books chairs tables bottles boxes candles coins cups plates spoons
forks knives lamps keys letters maps pencils pens notebooks tickets towels pillows blankets hats
shoes umbrellas bicycles cars boats ladders buckets hammers ropes crates barrels sacks eggs
chickens cows sheep goats horses ducks cats dogs rabbits trees roses tulips stamps paintings
clocks windows doors batteries cables screws nails bricks tiles visitors guests students workers
""".split()

ANIMALS = """
dog cat horse rabbit parrot hamster turtle goat pony goldfish canary hedgehog ferret duck pig
""".split()

JOBS = """
teacher doctor nurse baker farmer painter writer singer driver pilot sailor carpenter plumber
gardener cook waiter lawyer judge banker librarian chemist engineer architect dentist tailor
butcher florist photographer journalist firefighter translator musician mechanic electrician
""".split()

RELATIONS = """
sister brother mother father son daughter uncle aunt cousin boss neighbour teacher doctor friend
wife husband grandmother grandfather colleague landlord dentist
""".split()

EVENTS = """
meeting party concert lesson exam lecture wedding dinner lunch breakfast workshop conference
interview rehearsal match race tournament auction festival parade picnic excursion ceremony
presentation inspection delivery appointment class show film play game walk visit training
""".split()

WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

MONTHS = """
January February March April May June July August September October November December
""".split()

MATERIALS = """
wood glass steel stone paper leather silk wool cotton clay rubber marble brass bamboo concrete
""".split()

NUMBER_WORDS = """
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
""".split()

# Only for filler: past-tense verbs that take an object, and words of manner and time.
VERBS = """
carried cleaned painted repaired moved lifted opened closed found lost sold bought borrowed
returned watched admired described drew measured packed unpacked washed polished inspected
dropped kicked pushed pulled covered wrapped counted noticed forgot remembered mentioned
photographed followed visited passed crossed examined collected arranged prepared ordered
""".split()

ADVERBS = """
slowly quickly quietly carefully happily suddenly patiently proudly gently eagerly calmly again
""".split()

MOMENTS = """
yesterday|last week|in the morning|in the evening|before lunch|after dinner|at noon|at night|
two days ago|a month ago|during the storm|in the summer|last winter|on the way home|at dawn|
before the rain|after the long journey|early in the spring|late in the autumn|many years ago
""".replace("\n", "").split("|")

WEATHER = """
rainy sunny cloudy foggy windy stormy snowy mild humid icy pleasant gloomy
""".split()

ABSTRACT = """
weather history music travel cooking painting gardening trade education health sport language
science literature farming fishing sailing climbing reading writing dancing weaving pottery
""".split()

# Pieces of invented words: names and passwords that nobody has seen before.
ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sk sl st t th tr"
ONSETS_LIST = (ONSETS + " v w y z").split()
VOWELS = "a e i o u a e i o u ai ea ee oa oo ou ia".split()
CODAS = ["", "", "", "b", "d", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x", "nd", "rt", "st"]
