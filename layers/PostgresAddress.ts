// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Reads a connection string as libpq does: a postgres:// URL or key=value pairs (PostgreSQL manual,
 * section 34.1.1), as far as we support it. Pure but for the name of the account we run under.
 */
import * as Redacted from "effect/Redacted"
import * as Result from "effect/Result"
import * as os from "node:os"

/** Where a server is asked and as whom. */
export interface Server {
  /** A host, or the directory of a unix socket. */
  readonly host: string
  readonly port: number
  readonly database: string
  readonly username: string
  readonly password?: Redacted.Redacted
  /** encrypted: whoever answers; verified: only a server whose certificate holds. */
  readonly tls?: "encrypted" | "verified"
}

type Pairs = ReadonlyMap<string, string>

/** Where Debian and its relatives put the socket; libpq there looks in the same place. */
const socketDirectory = "/var/run/postgresql"

/** The last two are read and left to us. */
const known = [
  "host",
  "port",
  "dbname",
  "user",
  "password",
  "sslmode",
  "application_name",
  "connect_timeout"
]

/** allow and prefer promise nothing and so ask for nothing; require trusts any certificate. */
const tlsModes: { readonly [mode: string]: Server["tls"] } = {
  disable: undefined,
  allow: undefined,
  prefer: undefined,
  require: "encrypted",
  "verify-full": "verified"
}

const isPort = (port: number): boolean => Number.isInteger(port) && port >= 1 && port <= 65535

const fromPairs = (pairs: Pairs): Result.Result<Server, string> => {
  const strange = [...pairs.keys()].find((key) => !known.includes(key))
  if (strange !== undefined) {
    return Result.fail(`"${strange}" is not supported (${known.join(", ")} are)`)
  }
  const port = Number(pairs.get("port") ?? "5432")
  if (!isPort(port)) return Result.fail("the port is not one from 1 to 65535")
  const mode = pairs.get("sslmode") ?? "prefer"
  if (!Object.hasOwn(tlsModes, mode)) {
    return Result.fail(`sslmode ${mode} is not one of ${Object.keys(tlsModes).join(", ")}`)
  }
  const host = pairs.get("host") ?? socketDirectory
  if (host.includes(",")) return Result.fail("more than one host is not supported")
  const username = pairs.get("user") ?? os.userInfo().username
  const password = pairs.get("password")
  const tls = host.startsWith("/") ? undefined : tlsModes[mode]
  return Result.succeed({
    host,
    port,
    username,
    database: pairs.get("dbname") ?? username,
    ...(password === undefined ? {} : { password: Redacted.make(password) }),
    ...(tls === undefined ? {} : { tls })
  })
}

const decoded = (text: string): string => decodeURIComponent(text)

const fromUrl = (text: string): Result.Result<Server, string> => {
  if (!URL.canParse(text) || /%(?![0-9a-f]{2})/i.test(text)) return Result.fail("it is not a URL")
  const url = new URL(text)
  const pairs = new Map(url.searchParams)
  const host = decoded(url.hostname).replace(/^\[(.*)\]$/, "$1")
  if (host !== "") pairs.set("host", host)
  if (url.port !== "") pairs.set("port", url.port)
  if (url.username !== "") pairs.set("user", decoded(url.username))
  if (url.password !== "") pairs.set("password", decoded(url.password))
  if (url.pathname.length > 1) pairs.set("dbname", decoded(url.pathname.slice(1)))
  return fromPairs(pairs)
}

/** `key = value` and `key = 'a value'` with \' and \\ in it. */
const pair = /\s*([a-z_]+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s'\\]|\\.)*))(?:\s+|$)/gy

const fromWords = (text: string): Result.Result<Server, string> => {
  const pairs = new Map<string, string>()
  let end = 0
  for (const match of text.matchAll(pair)) {
    pairs.set(match[1]!, (match[2] ?? match[3] ?? "").replace(/\\(.)/g, "$1"))
    end = match.index + match[0].length
  }
  return end === text.length && pairs.size > 0
    ? fromPairs(pairs)
    : Result.fail("it is neither a postgres:// URL nor a list of key=value")
}

/** The server that `text` names; the failure says what is wrong and never repeats a password. */
export const parse = (text: string): Result.Result<Server, string> =>
  /^postgres(ql)?:\/\//.test(text) ? fromUrl(text) : fromWords(text.trim())
