// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A zone as a table, and its answers without any wire: what the DNS server of the tests serves and
 * what the DNS of the tests in memory gives. Touches nothing.
 */
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import { Dns, DnsError, isName } from "../../src/services/Dns.ts"
import type { RecordType } from "../../src/services/Dns.ts"

/** The records of one name; TXT in its strings, MX as "preference exchange". */
export interface Records {
  readonly A?: ReadonlyArray<string>
  readonly AAAA?: ReadonlyArray<string>
  readonly MX?: ReadonlyArray<string>
  readonly TXT?: ReadonlyArray<string | ReadonlyArray<string>>
  readonly PTR?: ReadonlyArray<string>
  readonly CNAME?: ReadonlyArray<string>
}

/** Trouble on demand, for a whole name. */
export type Trouble = "SERVFAIL" | "REFUSED" | "TIMEOUT"

/** Names in lower case without the last dot. What lies above a name exists too. */
export interface Zone {
  readonly [name: string]: Records | Trouble
}

export type Lookup =
  | { readonly _tag: "Records"; readonly records: ReadonlyArray<string | ReadonlyArray<string>> }
  | { readonly _tag: "NoData" }
  | { readonly _tag: "NoName" }
  | { readonly _tag: "Trouble"; readonly trouble: Trouble }

/** What a server of the zone says of a question; a CNAME is followed within the zone. */
export const lookup = (zone: Zone, asked: string, type: string, hops = 0): Lookup => {
  const name = asked.toLowerCase().replace(/\.$/, "")
  const found = zone[name]
  if (typeof found === "string") return { _tag: "Trouble", trouble: found }
  if (found === undefined) {
    const isBetween = Object.keys(zone).some((other) => other.endsWith(`.${name}`))
    return { _tag: isBetween ? "NoData" : "NoName" }
  }
  const records = found[type as RecordType] ?? []
  if (records.length > 0) return { _tag: "Records", records }
  const target = found.CNAME?.[0]
  return target === undefined || hops > 8
    ? { _tag: "NoData" }
    : lookup(zone, target, type, hops + 1)
}

export interface Question {
  readonly name: string
  readonly type: string
}

const failure = ({ name, type }: Question, detail: NonNullable<DnsError["detail"]>): DnsError =>
  new DnsError({
    reason: detail === "server" || detail === "timeout" ? "trouble" : "absent",
    detail,
    name,
    type,
    cause: undefined
  })

/**
 * A DNS in memory. `asked` collects the questions; a TIMEOUT never returns, so that the asker's own
 * clock decides.
 */
export const memory = (zone: Zone, asked: Array<Question> = []): Layer.Layer<Dns> =>
  Layer.succeed(
    Dns,
    Dns.of({
      resolve: (name, type) =>
        Effect.suspend(() => {
          const question = { name, type }
          if (!isName(name)) return Effect.fail(failure(question, "name"))
          asked.push(question)
          const answer = lookup(zone, name, type)
          switch (answer._tag) {
            case "Records":
              return Effect.succeed(answer.records.map((record) => [record].flat().join("")))
            case "NoData":
              return Effect.fail(failure(question, "nodata"))
            case "NoName":
              return Effect.fail(failure(question, "nxdomain"))
            case "Trouble":
              return answer.trouble === "TIMEOUT"
                ? Effect.never
                : Effect.fail(failure(question, "server"))
          }
        })
    })
  )
