// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * One option of the configuration: what its text means, what it is when it is not written, and
 * the sentence the manual prints. Everything that reads, checks or documents the configuration
 * starts from these values. Pure.
 */
import * as Duration from "effect/Duration"
import * as Result from "effect/Result"

/** An option whose value is an `A`. */
export interface Option<out A> {
  /** What a value is, with its article: "a duration", "one of verify, seal". */
  readonly type: string
  /** A text that is right, shown when another is wrong. */
  readonly example: string
  /** One sentence for the manual. */
  readonly doc: string
  /** The text that stands for an option not written; undefined = it must be written. */
  readonly default: string | undefined
  /** From the text to the value. The failure says more than "is not TYPE", or is empty. */
  readonly read: (text: string) => Result.Result<A, string>
  /** The sections a value leads to; the wiring is checked with them. */
  readonly targets?: (value: never) => ReadonlyArray<string>
  /** `NAME_1`, `NAME_2`, … up to this number; the value is the list of those written. */
  readonly numbered?: number
  /** Read as a file name: `$VAR` is expanded before `read`. */
  readonly file?: boolean
  /** Never shown. */
  readonly secret?: boolean
}

/** The options of one section, by name. */
export type Options = { readonly [name: string]: Option<unknown> }

/** What a section's options decode to. */
export type Values<O extends Options> = {
  readonly [K in keyof O]: O[K] extends Option<infer A> ? A : never
}

/** What an author gives with every option. */
export interface About {
  readonly doc: string
  readonly default?: string
  readonly example?: string
}

const make = <A>(
  type: string,
  example: string,
  about: About,
  read: (text: string) => Result.Result<A, string>
): Option<A> => ({
  type,
  example: about.example ?? about.default ?? example,
  doc: about.doc,
  default: about.default,
  read
})

/** An option of one's own kind; `read` fails with what is wrong. */
export const custom = make

const not = <A>(): Result.Result<A, string> => Result.fail("")

/** Any text on one line. */
export const text = (about: About): Option<string> =>
  make("a text", "some text", about, Result.succeed)

/** `yes` or `no`, in any case. */
export const yesNo = (about: About): Option<boolean> =>
  make("yes or no", "yes", about, (value) => {
    const word = value.toLowerCase()
    return word === "yes" || word === "no" ? Result.succeed(word === "yes") : not()
  })

/** A whole number between two bounds, both included. */
export const int = (
  about: About & { readonly min: number; readonly max: number }
): Option<number> =>
  make(`a whole number from ${about.min} to ${about.max}`, String(about.min), about, (value) => {
    if (!/^\d{1,15}$/.test(value)) return not()
    const n = Number(value)
    return n >= about.min && n <= about.max ? Result.succeed(n) : not()
  })

/** One of the words given. */
export const choice = <const W extends string>(words: ReadonlyArray<W>, about: About): Option<W> =>
  make(`one of ${words.join(", ")}`, words[0] ?? "", about, (value) => {
    const word = words.find((w) => w === value)
    return word === undefined ? not() : Result.succeed(word)
  })

const because = (reason: string): string => (reason === "" ? "" : `: ${reason}`)

const split = (value: string): ReadonlyArray<string> =>
  value.split(/\s+/).filter((word) => word !== "")

/** Words between blanks; the empty text is the empty list. */
export const list = (about: About): Option<ReadonlyArray<string>> =>
  make("a list of words between blanks", "one two", about, (value) => Result.succeed(split(value)))

/**
 * A list whose words are each read by `one`; what is wrong names the word.
 * `type` says what the words are: "domains".
 */
export const listOf = <A>(type: string, one: Option<A>, about: About): Option<ReadonlyArray<A>> =>
  make(`a list of ${type}`, one.example, about, (value) => {
    const values: Array<A> = []
    for (const word of split(value)) {
      const read = one.read(word)
      if (Result.isFailure(read)) {
        return Result.fail(`'${word}' is not ${one.type}${because(read.failure)}`)
      }
      values.push(read.success)
    }
    return Result.succeed(values)
  })

const unitsMillis: ReadonlyMap<string, number> = new Map(
  Object.entries({
    us: 0.001,
    ms: 1,
    s: 1e3,
    second: 1e3,
    seconds: 1e3,
    m: 6e4,
    min: 6e4,
    minute: 6e4,
    minutes: 6e4,
    h: 36e5,
    hour: 36e5,
    hours: 36e5,
    d: 864e5,
    day: 864e5,
    days: 864e5,
    w: 6048e5,
    week: 6048e5,
    weeks: 6048e5,
    month: 2592e6,
    months: 2592e6,
    year: 31536e6,
    years: 31536e6
  })
)

/** A century: what is longer is a slip, and `forever` has a word of its own. */
const maxMillis = 100 * unitsMillis.get("year")!

/** From the text to milliseconds; `forever` is infinite, undefined is no duration. */
const millis = (value: string): number | undefined => {
  if (value.toLowerCase() === "forever") return Number.POSITIVE_INFINITY
  // Step by step instead of one nested expression: no text makes it slow.
  const part = /\s*(\d{1,12})\s*([a-z]+)\s*/iy
  let sum = 0
  while (part.lastIndex < value.length) {
    const [, n, unit] = part.exec(value) ?? []
    const factor = unitsMillis.get((unit ?? "").toLowerCase())
    if (factor === undefined) return undefined
    sum += Number(n) * factor
  }
  return value === "" || sum > maxMillis ? undefined : sum
}

/** A least and a most, both included, written as the option itself would be. */
export interface Bounds {
  readonly between?: readonly [least: string, most: string]
}

const bounded = (what: string, { between }: Bounds): string =>
  between === undefined ? what : `${what} from ${between[0]} to ${between[1]}`

const inside = (
  n: number,
  { between }: Bounds,
  read: (text: string) => number | undefined
): boolean => between === undefined || (n >= read(between[0])! && n <= read(between[1])!)

/**
 * `5 s`, `5m`, `1 h 30 min`, `2 weeks`, `forever`; `m` is minutes, a month 30 days, a year 365;
 * a century at most.
 */
export const duration = (about: About & Bounds): Option<Duration.Duration> =>
  make(bounded("a duration", about), "30 s", about, (value) => {
    const n = millis(value)
    return n === undefined || !inside(n, about, millis) ? not() : Result.succeed(Duration.millis(n))
  })

const unitsBytes: ReadonlyMap<string, number> = new Map(
  Object.entries({
    "": 1,
    b: 1,
    k: 1024,
    kib: 1024,
    m: 1024 ** 2,
    mib: 1024 ** 2,
    g: 1024 ** 3,
    gib: 1024 ** 3,
    kb: 1e3,
    mb: 1e6,
    gb: 1e9
  })
)

const bytes = (value: string): number | undefined => {
  const match = /^(\d{1,12})\s*([a-z]*)$/i.exec(value)
  const factor = unitsBytes.get((match?.[2] ?? "?").toLowerCase())
  const n = match === null || factor === undefined ? Number.NaN : Number(match[1]) * factor
  return Number.isSafeInteger(n) ? n : undefined
}

/** Octets: `10M` and `10 MiB` are 10 × 1024², `10 MB` is 10 × 1000². */
export const size = (about: About & Bounds): Option<number> =>
  make(bounded("a size", about), "10 MiB", about, (value) => {
    const n = bytes(value)
    return n === undefined || !inside(n, about, bytes) ? not() : Result.succeed(n)
  })

const isLabel = (label: string): boolean => /^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$/.test(label)

/**
 * A domain name with at least two labels (RFC 1034 section 3.5, RFC 1123 section 2.1), in lower
 * case. It goes into EHLO, Received and addresses, so `localhost` and `$myhostname` are refused.
 */
export const domain = (about: About): Option<string> =>
  make("a domain name", "mail.example.org", about, (value) => {
    const name = value.toLowerCase()
    if (/^localhost(\.|$)/.test(name)) return Result.fail("others cannot find it")
    if (/[^ -~]/.test(name)) return Result.fail("write its ASCII form, which begins with xn--")
    const labels = name.split(".")
    // A last label of digits only would be an address of IPv4.
    if (name.length > 253 || !labels.every(isLabel) || /^\d+$/.test(labels.at(-1)!)) return not()
    return labels.length > 1 ? Result.succeed(name) : Result.fail("it has no dot")
  })

/** The name of a section that takes the mail over, without its `stage-`; lower case. */
export const section = (about: About): Option<string> => ({
  ...make<string>("the name of a stage section", "local", about, (value) =>
    /^[A-Za-z0-9._-]{1,64}$/.test(value) ? Result.succeed(value.toLowerCase()) : not()
  ),
  targets: (value: string) => [value]
})

/** A file name, in which `$VAR`, `${VAR}` and `${VAR:-default}` are expanded. */
export const file = (about: About): Option<string> => ({
  ...make<string>("a file name", "$PEPSI_HOME/file", about, (value) =>
    value === "" || value.includes("\0") ? not() : Result.succeed(value)
  ),
  file: true
})

/** The same option without a value when it is not written. */
export const optional = <A>(option: Option<A>): Option<A | undefined> => ({
  ...option,
  default: "",
  read: (value) => (value === "" ? Result.succeed(undefined) : option.read(value)),
  ...(option.targets === undefined
    ? {}
    : { targets: (value: never) => (value === undefined ? [] : option.targets!(value)) })
})

/** `NAME_1` … `NAME_max`, in the order of their numbers; none written = the empty list. */
export const numbered = <A>(option: Option<A>, max: number): Option<ReadonlyArray<A>> => ({
  ...option,
  default: "",
  numbered: max,
  read: (value) => Result.map(option.read(value), (one) => [one]),
  ...(option.targets === undefined
    ? {}
    : {
        targets: (values: never) =>
          (values as ReadonlyArray<never>).flatMap((one) => option.targets!(one))
      })
})
